"""What tests share: small models, tiny runs, servers and golden data."""
