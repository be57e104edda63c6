"""Human evaluation (§3.6, App. J): people compare what two edited models write, blind."""
