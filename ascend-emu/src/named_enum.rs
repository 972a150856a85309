//! Enumerations whose variants have names that messages and variables give them.

/// Defines an enumeration from the name of each variant: `ALL`, `name` and, from the name, `FromStr`.
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident {
            $( $(#[$doc:meta])* $variant:ident $(= $number:literal)? => $text:literal, )*
        }
    ) => {
        $(#[$meta])*
        $visibility enum $name {
            $( $(#[$doc])* $variant $(= $number)?, )*
        }

        impl $name {
            /// Every one, in order.
            $visibility const ALL: &'static [$name] = &[$( $name::$variant ),*];

            /// The name of it.
            $visibility fn name(self) -> &'static str {
                match self {
                    $( $name::$variant => $text, )*
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = ();

            fn from_str(name: &str) -> Result<Self, ()> {
                let mut all = $name::ALL.iter().copied();
                all.find(|one| one.name() == name).ok_or(())
            }
        }
    };
}
pub(crate) use named_enum;
