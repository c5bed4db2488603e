"""Files that modalities write."""

# endings that PIL writes without further options
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
