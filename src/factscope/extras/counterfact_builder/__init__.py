"""Build a CounterFact-style data set from ParaRel, Wikipedia and Wikidata."""
