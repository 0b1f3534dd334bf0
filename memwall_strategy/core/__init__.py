"""What the pillars share: names, blocks, lanes and the pillar life cycle. Imports nothing else of memwall."""
