"""Named datasets: where they come from, how they are downloaded and unpacked."""
