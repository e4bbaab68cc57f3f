"""What a training process needs while it runs."""
