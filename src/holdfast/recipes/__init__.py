"""What services are made of, over the primitives alone."""
