"""Tools around the core: building CounterFact, studies with human raters."""
