"""Everything that measures: benchmarks, quality evaluations, the suite, the soak test, and models to measure on."""
