"""Coefficients as bytes: values, index code, sections and the payload's wire format."""
