"""Tables, drawings and sentences that several verbs show. No verb, no network."""
