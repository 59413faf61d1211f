"""What one model does, in a file: made where one framework is installed, read where the other or none is."""
