"""What commands share: screens, options, help, completion."""
