"""The lab: everything that trains, measures and reports; needs the extra `lab`."""
