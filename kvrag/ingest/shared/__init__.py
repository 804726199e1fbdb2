"""An index that many machines share: its truth at a URL, a view of it on each machine."""
