"""What a Job needs, taken out of other libraries' trainers: Hugging Face's Trainer, Lightning's modules."""
