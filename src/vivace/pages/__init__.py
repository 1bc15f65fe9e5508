"""What all pages and endings are made of: the answer that comes first, charts as SVG, one template."""
