"""What is computed: networks and their shapes. It knows no device."""
