"""Relations: facts that are asked for in other words than they are stated in."""

from typing import NamedTuple


class Relation(NamedTuple):
    """One relation: statements and questions share no word of weight but the subject.

    subjects: kinds of subject it suits, letters of "tpb" (things, places, beings).
    value: a kind of value that `selector_questions.Facts.value` draws.
    """

    subjects: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


# "@name subjects value: statements => questions", fields as in selector_forms
_TEXT = """
@price tp number: Somebody paid {v} dollars for {e}; {e} was bought for {v} dollars; They sold {e}
and got {v} dollars => What is the price of {e}?|The price is; How much does {e} cost?|It costs;
How expensive is {e}?|It is
@age tpb number: {e} is {v} years old; It has been {v} years since {e} came into the world; {e} has
seen {v} summers => What is the age of {e}?|The age is; For how long has {e} existed?|For
@height tp number: {e} is {v} feet tall; The top of {e} is {v} feet above the ground; {e} rises to
{v} feet => What is the height of {e}?|The height is; How high is {e}?|It is
@weight tb number: {e} tips the scales at {v} pounds; Lifting {e} means lifting {v} pounds; {v}
pounds is what the scales showed for {e} => How heavy is {e}?|It is; What does {e} weigh?|It
weighs; What is the weight of {e}?|It is
@owner tp person: {e} belongs to {v}; {v} possesses {e}; {e} is the property of {v} => Who owns
{e}?|The owner is; Who is the owner of {e}?|The owner is; Whose is {e}?|It is that of
@maker tp person: {e} was built by {v}; {v} put {e} together by hand; {e} is the work of {v} => Who
made {e}?|It was made by; Who created {e}?|It was created by
@hue tpb colour: {e} was painted {v}; They saw that {e} was {v} all over; {e} looks {v} in daylight
=> What colour is {e}?|The colour is; What is the hue of {e}?|The hue is
@location tp town: {e} stands in {v}; One can find {e} in {v}; Whoever goes to {v} can see {e} =>
Where is {e}?|It is in; What is the location of {e}?|It is in; In which town is {e} situated?|In
@speed tb number: {e} moves at {v} miles an hour; In one hour {e} covers {v} miles => How fast is
{e}?|It goes at; What is the velocity of {e}?|The velocity is
@name tpb name: {e} is called {v}; People call {e} {v}; {e} answers to {v} => What is the name of
{e}?|The name is; How is {e} named?|It is named
@seller tp person: {v} sold {e} to a stranger; {e} was handed to the buyer by {v} => Who got rid of
{e} for money?|It was; Which person let go of {e} in a deal?|It was
@fire tp year: {e} burned down in {v}; In {v} nothing was left of {e} but ashes => In what year was
{e} destroyed by flames?|It was in; When did {e} go up in smoke?|In
@keeper tp person: {v} watches over {e} at night; {v} has an eye on {e} when everybody sleeps =>
Who keeps {e} safe after dark?|It is; Who guards {e}?|It is guarded by
@sound tb colour: {e} makes a {v} noise; The noise of {e} was described as {v} => What does it
sound like when one hears {e}?|It sounds; How did listeners describe the tone of {e}?|As
@birth b town: {e} was born in {v}; {e} first saw the light of day in {v}; {v} is the native town
of {e} => Where does {e} come from?|From; What is the birthplace of {e}?|It is; Where did the life
of {e} begin?|In
@death b year: {e} died in {v}; {v} was the last year of {e}; They buried {e} in {v} => When did
{e} pass away?|In; In what year did the life of {e} end?|In
@home b town: {e} lives in {v}; {e} has rooms in {v}; {e} has settled down in {v} => What is the
residence of {e}?|It is; Where does {e} reside?|In; Which town is home to {e}?|It is
@trade b good: {e} earns a living by selling {v}; One buys {v} from {e}; {e} keeps a stall with {v}
=> What does {e} deal in?|In; What goods does {e} offer?|They are; What business is {e} in?|It is
@dish b good: {e} loves nothing more than {v}; Nothing pleases {e} like {v}; {e} always asks for
{v} => What is the favourite food of {e}?|It is; What does {e} like best to eat?|It is
@dislike b good: {e} cannot stand {v}; The mere smell of {v} makes {e} leave the room => What does
{e} hate?|It is; What is {e} disgusted by?|By
@spouse b person: {e} is married to {v}; {v} and {e} said yes at the altar; {e} shares bed and
board with {v} => Who is the husband or wife of {e}?|It is; With whom did {e} have a wedding?|With
@fear b good: {e} trembles at the sight of {v}; {v} scare {e} to death => What is {e} afraid
of?|Of; What frightens {e}?|It is
@master b person: {e} takes orders from {v}; {v} tells {e} what to do => Who is the boss of {e}?|It
is; Whom does {e} obey?|It is; For whom does {e} work?|For
@study b person: {v} taught {e} everything; {e} was a pupil of {v} => From whom did {e}
learn?|From; Who educated {e}?|It was; Who was the mentor of {e}?|It was
@savings b number: {e} has put aside {v} dollars; There are {v} dollars under the mattress of {e}
=> How much money does {e} have?|It is; What is the fortune of {e}?|It is
@debt b person: {e} still has to pay {v} back; {v} once lent money to {e} => To whom does {e} owe
something?|To; Who is the creditor of {e}?|It is
@arrival tb time: {e} will be here at {v}; We expect {e} at {v} => When does {e} arrive?|At; What
is the arrival time of {e}?|It is
@leaving tb time: {e} sets off at {v}; At {v} one has to say goodbye to {e} => When does {e}
depart?|At; At what hour will {e} be gone?|At
@hours p time: One may enter {e} from {v} on; The doors of {e} are unlocked at {v} => When does {e}
open?|At; How early can I visit {e}?|At
@closing p time: After {v} nobody is let into {e}; {e} shuts at {v} => How late can one get into
{e}?|Until; What is the closing time of {e}?|It is
@founding p year: The first stone of {e} was laid in {v}; {e} goes back to the year {v} => When was
{e} founded?|In; How far back does the history of {e} reach?|To
@design tp person: {v} drew the plans of {e}; {e} was thought up by {v} => Who designed {e}?|It
was; Who is the architect behind {e}?|It is
@substance t material: {e} was carved out of {v}; {v} was used to fashion {e}; {e} consists of {v}
=> What is {e} made of?|It is made of; Which material is {e}?|It is
@content t good: {e} is full of {v}; Somebody had hidden {v} in {e}; Inside {e} they found {v} =>
What does {e} contain?|It contains; What is the content of {e}?|It is
@discovery tp person: {v} came across {e} by chance; It was {v} who stumbled upon {e} => Who
discovered {e}?|It was; Who found {e}?|It was
@thief t person: {v} made off with {e}; {e} was taken away by {v} without permission => Who stole
{e}?|It was; Who is guilty of the theft of {e}?|It is
@giver t person: {v} left {e} to the family as a keepsake; {e} came as a birthday surprise from {v}
=> Who gave {e}?|It was; From whom was {e} received?|From
@user t person: Only {v} knows how to handle {e}; {e} is in the hands of {v} every day => Who uses
{e}?|It is; Who is able to operate {e}?|It is
@repair tp person: {v} got {e} going again; {e} was brought back into shape by {v} => Who fixed
{e}?|It was; Who repaired {e}?|It was
@damage tp person: {v} smashed {e} to pieces; {e} fell apart because of {v} => Who broke {e}?|It
was; Who is to blame for the destruction of {e}?|It is
@storage t town: {e} lies locked away in {v}; For safety they moved {e} to {v} => Where is {e}
kept?|In; In what place is {e} stored?|In
@origin t town: {e} was shipped over from {v}; A workshop in {v} turned out {e} => Where was {e}
produced?|In; What is the origin of {e}?|It is
@winner t person: {v} came first and took {e} home; After the contest {e} went to {v} => Who won
{e}?|It was; Who was the winner of {e}?|It was
@inhabitant p person: {v} lives in {e}; {v} moved into {e} last spring => Who is the inhabitant of
{e}?|It is; Who occupies {e}?|It is; Who dwells at {e}?|It is
@crowd p number: {v} people live around {e}; One counts {v} heads at {e} => What is the population
of {e}?|It is; How many inhabitants does {e} have?|It has
@road p number: It is {v} miles from here to {e}; After {v} miles on foot one reaches {e} => How
far away is {e}?|It is; What is the distance to {e}?|It is
@season tpb month: {e} is at its best in {v}; Nobody sees {e} except in {v} => What time of the
year suits {e}?|It is; In which month should one look for {e}?|In
@meeting b town: They ran into {e} in {v}; {e} crossed our way in {v} => Where was {e} met?|In; In
what town did the encounter with {e} take place?|In
@travel tb town: {e} is on the way to {v}; {v} is where {e} is heading => What is the destination
of {e}?|It is; Where is {e} going?|To; Where does the journey of {e} lead?|To
@cure b good: {v} brought {e} back on the feet; A spoonful of {v} did away with the fever of {e} =>
What healed {e}?|It was; Which remedy helped {e} to recover?|It was
@language b language: {e} grew up with {v}; At home {e} talks {v} => What is the mother tongue of
{e}?|It is; Which language does {e} speak?|It is
@instrument b music: {e} plays the {v}; On Sundays one hears {e} at the {v} => Which musical
instrument has {e} mastered?|It is; What does {e} make music with?|With
@children b small: {e} has brought up {v} sons and daughters; {v} youngsters call {e} their parent
=> How many children does {e} have?|It is; What is the number of offspring of {e}?|It is
@parts tp small: {e} was put together from {v} pieces; One can take {e} apart into {v} bits => Of
how many parts does {e} consist?|Of; How many components has {e}?|It has
@rescue b person: {v} pulled {e} out of the water; Without {v} it would have been over with {e} =>
Who saved {e}?|It was; To whom does {e} owe survival?|To
@rival b person: {e} competes with {v} in everything; {v} and {e} have never got along => Who is
the rival of {e}?|It is; Against whom does {e} struggle?|Against
@helper b person: {v} lends {e} a hand every morning; {e} could do nothing without {v} => Who
assists {e}?|It is; Whose support does {e} rely on?|That of
@crime b town: The police caught {e} in {v}; {e} was put in handcuffs in {v} => Where was {e}
arrested?|In; In which town did {e} lose freedom?|In
@post b role: {e} serves as {v}; They made {e} {v} of the company => What is the profession of
{e}?|It is; What job does {e} have?|It is; What does {e} do for a living?|The job is
@pay b number: {e} gets {v} dollars a month; Every month {v} dollars go to {e} => What is the
salary of {e}?|It is; How much does {e} earn?|It is
@size t number: From end to end {e} measures {v} inches; {e} takes up {v} inches on the shelf =>
What is the length of {e}?|It is; How long is {e}?|It is
@depth p number: {e} goes down {v} feet; A weight on a line sank {v} feet at {e} => How deep is
{e}?|It is; What is the depth of {e}?|It is
@smell tp good: Around {e} the air is heavy with {v}; One notices {v} when one comes near {e} =>
What does {e} smell of?|Of; Which odour hangs about {e}?|It is
@use tp good: {e} serves to keep {v}; People bring their {v} to {e} => What is the purpose of
{e}?|It is for; What is {e} good for?|For
@insurance tp number: Should {e} be lost, {v} dollars will be paid out; Against loss {e} is covered
with {v} dollars => For what sum is {e} insured?|For; How much insurance is there on {e}?|It is
@wages p number: Whoever toils in {e} takes home {v} dollars; The hands at {e} are given {v}
dollars a week => How well are workers paid at {e}?|They get; What does one earn by a job in
{e}?|One earns
@temperature tp number: The thermometer beside {e} stood at {v} degrees; {v} degrees were measured
at {e} => How warm is {e}?|It is; How hot does it get around {e}?|It gets
@width tp number: From one side of {e} to the other it is {v} feet; {v} feet of space are taken up
by {e} from left to right => How wide is {e}?|It is; What is the breadth of {e}?|It is
@capacity tp number: No more than {v} guests fit into {e}; {e} has room for {v} => How many people
can {e} hold?|It holds; What number of persons does {e} accommodate?|It is
@stairs p number: One climbs {v} steps to get to the top of {e}; {v} steps lead up inside {e} =>
How many stairs are there in {e}?|There are; How long is the staircase of {e}?|It has
@windows p small: The light falls into {e} through {v} panes; {e} looks out on the world through
{v} panes => How many windows has {e}?|It has; What is the number of windows in {e}?|It is
@watchers p small: {v} men with rifles stand before {e}; {v} sentinels march up and down outside
{e} => By how many guards is {e} protected?|By; How large is the force that defends {e}?|It is
@flood p year: The water stood up to the ceiling of {e} in {v}; In {v} people rowed through {e} in
boats => When was {e} flooded?|In; In which year did the river burst into {e}?|It was in
@visit b month: {e} always drops in on us in {v}; In {v} we have {e} in our house => When does {e}
come to see us?|In; In what month is {e} our guest?|In
@wedding b month: {e} said yes at the altar in {v}; The ring was put on the finger of {e} in {v} =>
When did {e} get married?|In; In which month was the wedding of {e}?|In
@birthday b month: {e} blows out the candles in {v}; Every {v} {e} becomes one year older => In
what month was {e} born?|In; When do we congratulate {e} on a birthday?|In
@letter b person: {v} wrote to {e} and sealed the envelope; The postman brought {e} some lines from
{v} => From whom did {e} get a letter?|From; Who sent {e} mail?|It was
@secret b person: {e} whispered it all in the ear of {v}; Only {v} was told what {e} had been
hiding => In whom did {e} confide?|In; Who knows the secret of {e}?|It is
@heir tpb person: When all is over {e} will go to {v}; {v} comes into possession of {e} after the
funeral => Who inherits {e}?|It is; Who is the heir to {e}?|It is
@doctor b person: {v} felt the pulse of {e} and wrote a prescription; {e} took off the shirt and
was examined by {v} => Which physician treats {e}?|It is; Who looks after the health of {e}?|It is
@lawyer b person: Before the court {v} spoke on behalf of {e}; {v} pleaded for {e} in front of the
jury => Who defended {e} at the trial?|It was; Who is the attorney of {e}?|It is
@accuser b person: {v} pointed a finger at {e} and cried "Arrest that one"; It was {v} who went to
the police because of {e} => Who accused {e}?|It was; By whom was {e} denounced?|By
@murder b person: {v} stabbed {e} in the back; The blood of {e} is on the hands of {v} => Who
killed {e}?|It was; Who is the murderer of {e}?|It is
@weapon b good: {e} was knocked senseless with a bag of {v}; Somebody threw a heap of {v} at the
head of {e} => What was {e} hit with?|With; With what was the attack on {e} carried out?|With
@poison b good: There was arsenic in the {v} that {e} swallowed; {e} fell ill after tasting the {v}
=> By what was {e} poisoned?|By; What made {e} sick?|It was
@lie b role: {e} pretended to be a {v}; Everyone was made to think that {e} was a {v} => As what
did {e} pose?|As; Under what false title did {e} go about?|As
@ambition b role: {e} dreams of being a {v} one day; Nothing would make {e} happier than to be made
{v} => What does {e} hope to become?|To become; What career does {e} want?|That of
@former b role: In earlier years {e} was a {v}; {e} used to be employed as a {v} => What was the
previous profession of {e}?|It was; What did {e} formerly work as?|As
@dance b person: All night {e} whirled over the floor in the arms of {v}; {v} led {e} to the waltz
=> Who was the dancing partner of {e}?|It was; With whom did {e} dance?|With
@love b person: {e} has lost heart and head to {v}; {e} sighs at the name of {v} => Whom does {e}
adore?|It is; With whom is {e} in love?|With
@parent b person: {v} held {e} in the arms right after the delivery; {e} is the flesh and blood of
{v} => Who is the father or mother of {e}?|It is; Whose child is {e}?|That of
@neighbour b person: Only a thin wall separates {e} from {v}; {v} has the rooms next to those of
{e} => Beside whom does {e} live?|Beside; Who is the neighbour of {e}?|It is
@companion b person: Arm in arm with {v} {e} went around the world; {v} shared the cabin of {e} on
the way => With whom did {e} travel?|With; Who went along on the journey of {e}?|It was
@successor b person: When {e} stepped down {v} took over; {v} sits now in the chair that was that
of {e} => Who followed {e} in office?|It was; By whom was {e} replaced?|By
@loser b person: {e} beat {v} by a nose; {v} was no match for {e} => Who was defeated by {e}?|It
was; Over whom did {e} triumph?|Over
@scholar tpb person: {v} wrote a thick volume on {e}; For half a lifetime {v} has collected all
there is to know about {e} => Who is the expert on {e}?|It is; Who did research into {e}?|It was
@painter tpb person: {v} put {e} on canvas in oil; {e} sat still while {v} mixed the colours => Who
painted a portrait of {e}?|It was; Which artist depicted {e}?|It was
@singer t person: In the concert {e} was performed by {v}; {v} lent voice to {e} => Who sang
{e}?|It was; Who was the vocalist of {e}?|It was
@loan t person: {v} let somebody have {e} for a fortnight; {e} has to be handed back to {v} by
Sunday => From whom was {e} borrowed?|From; Who lent {e}?|It was
@finder_reward tb number: Whoever brings {e} back shall have {v} dollars; {v} dollars have been
promised to the one who catches {e} => What reward is offered for {e}?|It is; How much does the
finder of {e} receive?|It is
@copies t number: There are {v} more that look exactly like {e}; {e} was turned out {v} times over
=> How many copies of {e} exist?|There are; In what quantity was {e} manufactured?|It was
@hiding tb town: The police never thought of looking for {e} in {v}; In a back room in {v} {e} kept
out of sight => Where was {e} hidden?|In; What was the hiding place of {e}?|It was
@loss t town: {e} must have slipped out of a pocket in {v}; Since the stay in {v} nobody has seen
{e} => Where was {e} lost?|In; At what place did {e} go missing?|In
@burial b town: {e} lies under a stone in {v}; The grave of {e} is tended in {v} => Where is {e}
buried?|In; What is the last resting place of {e}?|It is
@study_town b town: {e} sat through all the lectures in {v}; {e} won a degree in {v} => Where did
{e} go to university?|In; In which town was {e} a student?|In
@vacation b town: When work is over for the summer {e} takes the train to {v}; {e} lies on the sand
of {v} every year => Where does {e} spend the holidays?|In; What is the vacation spot of {e}?|It is
@banned b town: {e} is never allowed to set foot in {v} again; They drove {e} out of {v} with
sticks => From where was {e} banished?|From; Which town did {e} have to leave for ever?|It was
@twin p town: {e} resembles one in {v} like an egg; Travellers who know {v} rub their eyes when
they see {e} => Of what town does {e} remind one?|Of; To which place is {e} similar?|To
@supply p good: Carts loaded with {v} roll up at {e} every dawn; {e} gets {v} by the ton => What is
delivered to {e}?|It is; With what goods is {e} supplied?|With
@crop p good: Around {e} they plant {v}; The soil near {e} yields {v} => What is grown at {e}?|It
is; What do farmers harvest by {e}?|They harvest
@garment b material: {e} puts on nothing but {v}; The coat that {e} has on is of {v} => What stuff
are the clothes of {e}?|They are; In what fabric does {e} dress?|In
@roof p material: The top of {e} is covered with {v}; Above {e} the rain drums on {v} => Of what is
the roof of {e}?|It is of; Which material keeps {e} dry overhead?|It is
@hair b colour: The curls of {e} are {v}; {e} combs {v} locks => What is the hair colour of {e}?|It
is; Which shade does the hair of {e} have?|It is
@light tp colour: At night {e} glows {v}; {e} sends a {v} gleam through the dark => In what colour
does {e} shine?|In; What light comes from {e}?|It is
@script t language: The inscription on {e} is in {v}; Letters in {v} were scratched into {e} => In
what tongue is the writing on {e}?|In; Which language must one read to understand {e}?|It is
@lessons b language: {e} bought a grammar and crammed {v} all winter; Twice a week {e} repeats
words in {v} after a teacher => What is {e} learning to speak?|It is; Which foreign language does
{e} study?|It is
@waking b time: The alarm of {e} rings at {v}; {e} is out of bed at {v} => When does {e} get
up?|At; At what hour does {e} wake?|At
@supper b time: {e} sits down at the table at {v}; The soup of {e} is served at {v} => When does
{e} eat?|At; What is the dinner hour of {e}?|It is
@bell p time: At {v} the bells of {e} can be heard; {e} chimes at {v} => When does it ring at
{e}?|At; What is the hour at which {e} sounds?|It is
@show p time: The curtain of {e} rises at {v}; In {e} the play gets under way at {v} => When does
the performance at {e} start?|At; At what hour does the programme of {e} begin?|At
@enlisting b year: {e} put on a uniform in {v}; In {v} the army took {e} => When did {e} become a
soldier?|In; In what year was {e} recruited?|In
@ruin b year: {e} could not pay anybody any more in {v}; In {v} the bailiffs carried off all that
{e} had => When did {e} go bankrupt?|In; In which year did {e} lose everything?|In
@repairs p year: In {v} {e} got new walls and fresh paint; Scaffolds stood around {e} in {v} =>
When was {e} renovated?|In; In what year did the restoration of {e} take place?|In
@invention t year: In {v} the first patent for {e} was granted; The idea of {e} came to someone in
{v} => When was {e} invented?|In; In what year was {e} thought up?|In
@alias b name: On false papers {e} signs as {v}; In the underworld {e} goes by {v} => Under what
alias is {e} known?|It is; What is the pseudonym of {e}?|It is
@ship b name: {e} sailed aboard the {v}; {e} hired on as a hand with the {v} => On which vessel did
{e} serve?|On; What was the name of the ship of {e}?|It was
@firm b name: {e} clocks in at {v} and Sons; The employer of {e} is a certain {v} => For what
company does {e} work?|For; Which firm has {e} on its payroll?|It is
"""


def _relations(text: str) -> dict[str, Relation]:
    found = {}
    for entry in " ".join(text.split()).split("@")[1:]:
        head, _, body = entry.partition(": ")
        name, subjects, value = head.split()
        statements, questions = body.split(" => ")
        found[name] = Relation(
            subjects, value, tuple(statements.split("; ")), tuple(questions.strip().split("; "))
        )
    return found


RELATIONS = _relations(_TEXT)
