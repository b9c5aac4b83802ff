"""What is true of any checkpoint's folder: names, settings, weights, legal files, outputs, and how a command line ends."""
