"""The demonstration: several caches answer the same questions side by side, and every format is measured."""
