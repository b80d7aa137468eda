"""All planning methods of the literature on one graph, judged by one simulator. No torch."""
