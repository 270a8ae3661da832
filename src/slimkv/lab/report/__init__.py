"""How results are shown: one HTML page style, SVG charts, and tables in Markdown documents."""
