"""The Hydra groups of ``memwall-train``; a package, so that ``pkg://memwall_strategy.conf`` finds them once installed."""
