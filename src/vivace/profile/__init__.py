"""What a step does, and where its time goes."""
