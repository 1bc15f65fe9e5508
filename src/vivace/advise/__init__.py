"""Which device for which job: the catalogue, the prices and what follows from them. Imports no torch."""
