"""The equations of the papers and of the five sources (everyformer/sources.py) as slow, literal code without library imports."""
