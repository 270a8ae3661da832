"""attend: queries and pages -> attention output, for decode, speculative verification and prefill."""
