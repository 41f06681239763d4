"""What stands around the program: the pins, make, the image, the compose file, and the image's command as a process."""
