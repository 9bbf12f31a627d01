"""From images to predictions: the one path that predict, evaluate, inspect, bench, export check and serve use."""
