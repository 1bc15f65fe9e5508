"""Networks that several recipes share."""
