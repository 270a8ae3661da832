"""copy: single tokens between slots, and between slots and rows outside the pages."""
