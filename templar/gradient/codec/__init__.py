"""Coefficients as bytes: the value code, the planes of bits, sections, and the payload's wire format."""
