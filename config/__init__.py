"""Settings: tables of configs, models of the settings file, its loader. A leaf of the packages."""
