"""What things cost: a description in, nanoseconds out, with the source that answered."""
