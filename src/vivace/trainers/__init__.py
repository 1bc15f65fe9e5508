"""What a Job needs, taken out of other libraries: Hugging Face's Trainer, Lightning's modules, Keras' models."""
