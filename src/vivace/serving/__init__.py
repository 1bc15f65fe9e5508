"""A trained model outside of training: its forms, their files, and whether they are still the same model."""
