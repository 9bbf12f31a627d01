"""The systems from which the Vision Transformer descends, and which descend from it: small, exact and measured."""
