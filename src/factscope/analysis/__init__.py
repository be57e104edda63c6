"""From records to numbers: averages with 95 % confidence intervals. No torch."""
