"""Looking at models from outside: the contracts they keep, pictures of what they do."""
