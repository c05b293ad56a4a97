"""What compare.py and report.py are made of."""
