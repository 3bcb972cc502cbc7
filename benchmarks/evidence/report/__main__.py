from .page import main

main()
