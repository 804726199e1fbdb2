"""`kvrag bench load`: loading stored KV beside computing what is not stored."""
