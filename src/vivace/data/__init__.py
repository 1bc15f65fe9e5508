"""What a loader gives: its order, repeatable; its damaged samples; its workers that hang."""
