"""What each library does in the loader benchmark."""
