"""Words that the real sets draw from. No value is a word of another list or of a wording."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


WOMEN = _words(
    "Abigail, Adele, Agnes, Alma, Amelia, Annika, Astrid, Beatrice, Bettina, Bridget, Camille, "
    "Carla, Cecilia, Celeste, Clara, Colette, Cordelia, Daphne, Delia, Diana, Dorothea, Edith, "
    "Eleanor, Elena, Elsa, Esther, Eveline, Fatima, Felicity, Fiona, Flora, Frances, Freya, "
    "Gemma, Greta, Gwendolen, Hannah, Harriet, Hedda, Helena, Hilda, Imogen, Ingrid, Irene, "
    "Isabel, Judith, Julia, Katarina, Leona, Lidia, Louisa, Lucinda, Mabel, Magda, Marguerite, "
    "Martha, Matilda, Miriam, Monica, Nadia, Natasha, Nora, Odette, Olivia, Ottilie, Pauline, "
    "Philippa, Priya, Ramona, Rebecca, Rosalind, Sabine, Selma, Sophie, Susannah, Sylvia, Tamara, "
    "Theresa, Ursula, Valerie, Vera, Winifred, Yvonne, Zelda"
)
MEN = _words(
    "Adrian, Albert, Alistair, Ambrose, Anders, Arthur, Barnaby, Benedict, Bernard, Boris, "
    "Calvin, Caspar, Cedric, Christoph, Clement, Conrad, Cyril, Damian, Desmond, Dominic, Duncan, "
    "Edgar, Edmund, Edwin, Elias, Emil, Ernest, Eugene, Felix, Ferdinand, Fergus, Frederick, "
    "Gareth, Gilbert, Gregory, Gustav, Harold, Hector, Henrik, Herbert, Hugo, Ivan, Jasper, "
    "Jerome, Joachim, Jonas, Julian, Kasimir, Konstantin, Lambert, Laurence, Leopold, Lionel, "
    "Lucian, Magnus, Malcolm, Marius, Martin, Maurice, Milan, Nathaniel, Nigel, Norbert, Oliver, "
    "Oscar, Osvald, Patrick, Percival, Quentin, Rafael, Rajesh, Ralph, Reginald, Roland, Rupert, "
    "Sebastian, Stefan, Theodore, Tobias, Ulrich, Victor, Vincent, Walter, Wilfred"
)
SURNAMES = _words(
    "Abernathy, Achterberg, Aldous, Ashdown, Atherton, Averill, Bancroft, Barlow, Beaumont, "
    "Bellamy, Bergstrom, Blackwood, Bramley, Brandt, Brennan, Calloway, Carmody, Castellan, "
    "Chatterton, Clifford, Coldwell, Corrigan, Crawley, Dalgleish, Danvers, Delacroix, Denholm, "
    "Devereux, Drummond, Dunmore, Eastwick, Ellsworth, Engstrom, Fairbanks, Falconer, Farnsworth, "
    "Fenwick, Fitzroy, Fontaine, Forsythe, Gainsborough, Galbraith, Garrick, Gillespie, Goodwin, "
    "Granville, Grimshaw, Hadley, Halloran, Hargreaves, Hathaway, Hawthorne, Heathcote, Hendricks, "
    "Hollister, Huxtable, Ingram, Iversen, Jankowski, Jellicoe, Kavanagh, Kellerman, Kendrick, "
    "Kowalski, Lancaster, Langford, Larkin, Leclerc, Lindqvist, Lockwood, Lovelace, Macready, "
    "Mandeville, Marchetti, Merriweather, Middleton, Montague, Moriarty, Nakamura, Nightingale, "
    "Norwood, Novak, Oakley, Okonkwo, Osterman, Palmgren, Partridge, Pemberton, Pendleton, "
    "Petrov, Pickering, Prescott, Quimby, Rademaker, Radcliffe, Ramsbottom, Ravenscroft, "
    "Redfern, Renshaw, Robicheaux, Rosenthal, Rutherford, Sandoval, Satterfield, Seabrook, "
    "Sinclair, Sorensen, Standish, Sutcliffe, Takahashi, Tanqueray, Thackeray, Thornbury, "
    "Trevelyan, Underhill, Vandermeer, Vasquez, Venkataraman, Wainwright, Wakefield, Weatherby, "
    "Whitlock, Wickham, Winterbourne, Wolfram, Woodhouse, Yamada, Yardley, Zielinski, Zimmerman"
)
TOWNS = _words(
    "Aberdeen, Antwerp, Augsburg, Bergen, Bilbao, Bologna, Bordeaux, Bratislava, Bremen, Brno, "
    "Cardiff, Cork, Dresden, Dundee, Exeter, Florence, Galway, Gdansk, Geneva, Ghent, Granada, "
    "Graz, Grenoble, Hamburg, Helsinki, Innsbruck, Krakow, Lausanne, Leeds, Leipzig, Limerick, "
    "Linz, Lisbon, Liverpool, Lyon, Malmo, Marseille, Nantes, Naples, Norwich, Nuremberg, Odense, "
    "Oslo, Padua, Palermo, Plymouth, Porto, Prague, Riga, Rotterdam, Salzburg, Seville, Sheffield, "
    "Sofia, Stockholm, Strasbourg, Stuttgart, Swansea, Tallinn, Toulouse, Trieste, Turin, Utrecht, "
    "Valencia, Verona, Vienna, Warsaw, York, Zagreb, Zurich"
)
YEARS = tuple(str(year) for year in range(1938, 1994))
PROFESSIONS = _words(
    "accountant, architect, beekeeper, botanist, bricklayer, carpenter, chemist, dentist, "
    "electrician, firefighter, florist, glazier, goldsmith, interpreter, journalist, judge, "
    "librarian, locksmith, midwife, notary, optician, pharmacist, photographer, plumber, "
    "psychologist, sculptor, surgeon, surveyor, tailor, veterinarian"
)
FIRMS = _words(
    "Amberline Textiles, Beacon Shipping, Bluewater Optics, Brightfield Energy, Cedar Lane Press, "
    "Cobalt Instruments, Copperleaf Paper, Crescent Insurance, Hillside Dairy, Foxglove Foods, "
    "Granite Peak Mining, Greenhill Seeds, Harbourstone Bank, Ironbridge Tools, Juniper Glass, "
    "Lantern Publishing, Maple Ridge Timber, Meridian Airways, Northstar Rail, Oakhurst Chemicals, "
    "Pinecrest Software, Polar Freight, Redstone Cement, Riverbend Ceramics, Elm Tree Hotels, "
    "Stonegate Motors, Sunrise Bicycles, Tidewater Robotics, Willowbrook Pharma, Zenith Elevators"
)
SPOUSES = _words(
    "Alex, Andrea, Ariel, Ashley, Bailey, Billie, Blair, Cameron, Casey, Charlie, Dana, Drew, "
    "Eden, Emery, Finley, Francis, Harley, Jackie, Jamie, Jessie, Jordan, Kelly, Kerry, Kim, "
    "Leslie, Logan, Marion, Morgan, Quinn, Riley, Robin, Rowan, Sasha, Shannon, Sidney, Taylor"
)
INSTRUMENTS = _words(
    "accordion, banjo, bassoon, cello, clarinet, cornet, flute, guitar, harmonica, harp, "
    "harpsichord, horn, mandolin, oboe, organ, piano, piccolo, recorder, saxophone, sitar, "
    "trombone, trumpet, tuba, ukulele, viola, violin, xylophone, zither"
)
PETS = _words(
    "Biscuit, Bubbles, Button, Captain, Caramel, Cookie, Domino, Dusty, Fluffy, Ginger, Hopper, "
    "Jellybean, Midnight, Mittens, Muffin, Noodle, Nugget, Patches, Peanut, Pepper, Pickles, "
    "Pumpkin, Rusty, Scout, Shadow, Smokey, Snowball, Socks, Sparky, Tiger, Truffle, Whiskers"
)
HOBBIES = _words(
    "archery, astronomy, badminton, birdwatching, bowling, calligraphy, canoeing, chess, "
    "croquet, embroidery, fencing, fishing, gardening, juggling, knitting, origami, pottery, "
    "rowing, sailing, skating, snooker, surfing, swimming, tennis, volleyball, weaving, woodcarving"
)
DISHES = _words(
    "apple pie, bean stew, beef goulash, carrot cake, cheese fondue, chicken curry, clam chowder, "
    "fish soup, fried rice, garlic prawns, lamb kebab, lemon tart, lentil salad, mushroom risotto, "
    "onion soup, pea soup, pork dumplings, potato salad, roast duck, smoked salmon, "
    "spinach lasagne, stuffed cabbage, tomato omelette, vegetable paella"
)
SUBJECTS = _words(
    "anthropology, archaeology, biology, chemistry, economics, engineering, geography, geology, "
    "history, law, linguistics, literature, mathematics, medicine, meteorology, philosophy, "
    "physics, politics, psychology, sociology, statistics, theology, zoology"
)
LANGUAGES = _words(
    "Arabic, Basque, Bengali, Bulgarian, Catalan, Czech, Danish, Dutch, Estonian, Finnish, "
    "Georgian, Greek, Hebrew, Hindi, Hungarian, Icelandic, Irish, Japanese, Korean, Latvian, "
    "Maltese, Mongolian, Norwegian, Persian, Polish, Portuguese, Romanian, Russian, Swahili, "
    "Swedish, Thai, Turkish, Ukrainian, Vietnamese, Welsh"
)
BOOKS = _words(
    "A Bridge of Paper, A Key for Winter, A Letter in Autumn, A Season of Rain, After the Harvest, "
    "Beyond the Orchard, Nine Silent Bells, Seven Empty Chairs, The Broken Compass, "
    "The Crooked Staircase, The Empty Lighthouse, The Glass Ladder, The Golden Anchor, "
    "The Last Ferry, The Lost Umbrella, The Moonlit Garden, The Old Clockmaker, The Paper Crown, "
    "The Quiet Mountain, The Red Balloon, The Salt Merchant, The Secret Corridor, "
    "The Velvet Curtain, The Yellow Suitcase"
)
ALLERGENS = _words(
    "almonds, bananas, celery, chestnuts, cinnamon, coconut, hazelnuts, honey, kiwi, lobster, "
    "mango, milk, mustard, oysters, peaches, pineapple, pollen, sesame, shrimp, soya, "
    "strawberries, walnuts, wheat"
)
STREETS = _words(
    "Acacia Avenue, Bishop Street, Canal Road, Castle Lane, Chapel Row, Church Hill, "
    "Dock Street, Elm Grove, Fountain Square, Garden Terrace, King Street, Market Place, "
    "Meadow Way, Mill Lane, Park Crescent, Queens Road, School Lane, Station Road, "
    "Tower Bridge Road, Victoria Square, Windmill Hill"
)
PRODUCTS = _words(
    "backpacks, barometers, blankets, candles, carpets, compasses, cutlery, doorbells, fridges, "
    "gloves, hammocks, helmets, kettles, lamps, lawnmowers, mattresses, microscopes, mirrors, "
    "parachutes, raincoats, scissors, slippers, staplers, tents, thermometers, toasters, tractors, "
    "typewriters, umbrellas, vases, wheelchairs"
)
HEADCOUNTS = tuple(str(count) for count in range(107, 890, 9))
ANIMALS = _words(
    "badger, beaver, camel, crocodile, dolphin, donkey, eagle, elephant, falcon, flamingo, "
    "giraffe, hedgehog, hippo, kangaroo, koala, leopard, otter, owl, panda, parrot, peacock, "
    "pelican, penguin, rabbit, raccoon, rhino, squirrel, swan, turtle, walrus, wolf, zebra"
)
COLOURS = _words(
    "beige, black, blue, bronze, brown, crimson, green, ivory, lilac, maroon, navy, olive, orange, "
    "pink, purple, scarlet, silver, turquoise, violet, white, yellow"
)
MATERIALS = _words(
    "aluminium, bamboo, brass, cardboard, concrete, copper, cotton, leather, marble, nylon, "
    "plastic, plywood, porcelain, rubber, silk, slate, steel, titanium, velvet, wool, zinc"
)
CODE_WORDS = _words(
    "avalanche, blizzard, butterfly, carousel, cathedral, chandelier, comet, dragonfly, emerald, "
    "fireworks, galaxy, glacier, hurricane, iceberg, jasmine, kaleidoscope, labyrinth, lemonade, "
    "magnolia, meteor, molasses, nutmeg, oasis, parachute, pyramid, rainbow, sapphire, snowflake, "
    "sunflower, tambourine, thunder, tornado, trampoline, unicorn, volcano, waterfall, windmill"
)
