"""Small errors put into the code, each with the test that has to fail."""
