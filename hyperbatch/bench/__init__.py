"""The measurements behind `hyperbatch bench`."""
