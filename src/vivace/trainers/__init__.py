"""What a Job needs, taken out of other libraries: Hugging Face's Trainer, Lightning modules, Keras models."""
