"""A picture of what threads and streams did for some steps, and the SVG of it."""
