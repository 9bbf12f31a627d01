"""From files on disk to pictures and class numbers. Knows no models."""
