"""Times of the closed forms, of verification, of decoding, and of the device path."""
