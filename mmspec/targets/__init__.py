"""What scores a draft, and what it remembers of the request."""
