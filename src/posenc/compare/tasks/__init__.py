"""What the comparison trains on: generated, licence-free, endless."""
