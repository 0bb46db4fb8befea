"""Facts and settings of the host: huge pages, NUMA nodes, processors, descriptors."""
